"""Operators: what a stream does to a State. A batch and its epoch in, effects or answers out."""
