"""Play a compiled world model in the browser: the world's files, one visitor's game, and the web server."""
