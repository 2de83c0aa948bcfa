"""Small Trio tools: how a task sleeps, how it is woken or cut, how it is tried again."""
