"""Operations of the networks: references, forms for CPUs, and the choice between them and Triton kernels."""
