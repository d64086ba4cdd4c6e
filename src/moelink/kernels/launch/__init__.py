"""What a launch needs besides its kernel: constants, grid, SM limit, the launcher."""
