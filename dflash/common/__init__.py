"""What every room needs and none owns. Each file is a door of its own, and imports nothing of this package."""
