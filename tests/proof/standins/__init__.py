"""Stand-ins for packages and GPU code that megatron-core uses and a CPU lacks, with their data structures."""
