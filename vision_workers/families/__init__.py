"""What is known about each family of image-to-text models: one file per family."""
