"""Announced groups as tasks: who announces, what each daemon says, whether each group answers.

listen (UDP) ------> groups <------ watch, one per daemon
                       ^ '--------> probe, one per group
                       published: endpoints, and why the rest are none
"""
