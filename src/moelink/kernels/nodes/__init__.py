"""Communicate between nodes: puts over a network, and the relays of the two-level form.

=================  =====================================================================================================
internode          puts to ranks of other nodes, and their signals
levels             the two-level form: which rank of a node a copy crosses to, the words that its relays carry
put_messages       dispatch: puts of messages and counts; put_rows: combine's puts of rows and heads
relay              dispatch: the sender role stores one copy of a token for each other node
forward            dispatch: the forwarder of that node sends it on to its ranks
collect            combine: a node's rows are summed before they cross; level_rows: home waits for them
past               both: ranks whose relay is masked exchange without one
relay_constants    launch constants of the relays' regions
=================  =====================================================================================================
"""
