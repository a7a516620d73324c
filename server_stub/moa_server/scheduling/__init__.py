"""What goes into the next step, and the thread of control that runs the steps."""
