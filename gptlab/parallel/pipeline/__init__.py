"""A GPT in stages over several processes, with torch.distributed.pipelining's schedules.

cutting.py    a stage of the model
schedules.py  the order of forward and backward passes, and torch's runtime for it
holding.py    a process's weights: whole stages, or rows of them
ties.py       an embedding that is the head as well, on two stages
pipelined.py  the strategies `pp`, `pp+ddp` and `pp+fsdp`
simulator.py  a schedule's timeline from the times of its stages
timeline.py   what a step really did, measured
"""
