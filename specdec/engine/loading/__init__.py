"""From a checkpoint's folder to a model that passed its self-check: files, memory, refusals, choice of kernels."""
