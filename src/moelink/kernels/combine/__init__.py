"""The kernels of combine, in the order in which a row meets them: kernel, send, reduce."""
