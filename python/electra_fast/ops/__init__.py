"""Operations of the networks: references, forms for CPUs, and the dispatch between them and Triton kernels."""
