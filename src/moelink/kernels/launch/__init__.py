"""Launch kernels: constants, grid, SM limit, the launcher."""
