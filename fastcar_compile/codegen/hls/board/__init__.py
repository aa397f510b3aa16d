"""What goes to the board: host program in C++, Vitis project, and how a host fills a kernel's arguments."""
