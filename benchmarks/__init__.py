"""Speed, memory and call overhead of flash3 beside the other attention libraries of a machine."""
