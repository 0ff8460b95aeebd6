"""User code as it travels and is kept: source text, rules, tables and transaction functions."""
