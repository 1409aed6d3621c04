"""An emulated CUDA device. Its memory is host memory, and its work is done late and in an adverse order."""
