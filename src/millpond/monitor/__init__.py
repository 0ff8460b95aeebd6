"""`millpond top`: a pond, live in a terminal. What is shown (`loads`, `pages`) knows nothing of where it comes from (`loop`)."""
