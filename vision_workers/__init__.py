"""Image preprocessing: the bytes of picture files in, the tensors of the checkpoint's own image processor out."""
