"""Running a model on a GPU: attention over the paged cache in Triton, and CUDA graphs."""
