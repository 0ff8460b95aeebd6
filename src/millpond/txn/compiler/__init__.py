"""From the text of transaction functions to kernels: what they do, and the code that does it for a whole epoch."""
