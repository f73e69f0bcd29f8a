"""How processes start and end: the environment, the ranks of a machine, their sources, what they say, signals.

environment.py and start.py are programs, for run.sh and test.sh, and import nothing of ours; a script imports the others.
"""
