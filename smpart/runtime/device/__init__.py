"""The model body on a device: attention kernels over paged memory, CUDA graphs."""
