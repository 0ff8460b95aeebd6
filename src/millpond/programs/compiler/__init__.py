"""From the text of a class to a graph of tasks.

`source` finds the text, `fields` the state, `limits` what cannot be; `normal` brings each method, with the helpers it calls,
into a form in which a statement accesses one field in one place (`accesses`); `types` tells what variables are; `split`
cuts it into tasks, `live` tells what goes from one to the next, `levels` in which round each field is.
"""
