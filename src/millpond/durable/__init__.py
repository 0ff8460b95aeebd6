"""Every byte that must last goes through here: files, their form, and the points where a process may die."""
