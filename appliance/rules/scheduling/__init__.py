"""Where a request goes, and why: names to members, filters, scorers, a picker, and what outcomes change."""
