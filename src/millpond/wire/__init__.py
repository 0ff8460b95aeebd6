"""Messages between driver, tasks, coordinator and containers, and how they travel."""
