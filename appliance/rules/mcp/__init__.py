"""One tool server out of many: messages, the two protocol eras, names, and what a request is before it is answered."""
