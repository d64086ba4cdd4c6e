"""Triton kernels of the symmetric transport: one protocol step a file, the same source compiled and interpreted.

===========  ============================================================================================
signals      publish, wait, give up: the memory order of every signal
routes       who owns an expert; what the tokens before a given one need
numeric      rounding
send         dispatch, sender role: count, quantise, one message per (token, destination rank)
receive      dispatch, receiver role: wait, place rows, pad groups
dispatch     the two roles as one launch or two
send_back    combine, expert role: ``send_tokens_back``
reduce       combine, home role: ``wait_for_all_arrivals``, ``reduce_and_copy_to_output``
combine      the two roles as one launch or two
spec         what is fixed when a kernel is compiled
===========  ============================================================================================

Importing this package does not import triton; its modules do.
"""
