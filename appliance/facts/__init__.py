"""Values everybody speaks in: frozen classes without behaviour that needs a clock, a socket or luck."""
