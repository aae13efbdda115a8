"""The garbage collector, in processes that pass tokens on."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """What is there now stays until the process ends, and the collector looks no further at it.

    To be called once, when all is loaded: the modules of a gateway or a rank are a hundred thousand objects, and a full
    collection took up to a tenth of a second, in which no token went anywhere.
    """
    gc.collect()
    gc.freeze()
