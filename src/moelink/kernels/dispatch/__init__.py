"""The kernels of dispatch, in the order in which a token meets them: kernel, route, counts, send, receive, unpack,
scales."""
