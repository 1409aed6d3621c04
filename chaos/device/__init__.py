"""A CUDA device that is not there: its memory is host memory, and its work is done late, in an adverse order."""
