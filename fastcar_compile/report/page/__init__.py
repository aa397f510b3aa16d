"""The inspection page of an artifact: typed data, and one HTML file that shows it."""
