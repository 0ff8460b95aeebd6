"""Programs: plain Python classes over state, as graphs of task elements over state elements.

A class whose fields are annotated `Partitioned` or `Partial` runs as it is (`plain`), and is translated (`compiler`)
into a `Graph`: each method becomes tasks, each of which accesses one field in one place, and hands what is still
needed to the next one. `local` runs a graph in one process, epoch by epoch, in rounds, as ponds do. `elements` are
what fields hold. Nothing here knows of ponds, Spark or files.
"""
