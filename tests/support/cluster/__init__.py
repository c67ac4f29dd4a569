"""A whole cluster of real processes under load and faults; tests/crash/README.md explains how it is run and read.

history    what clients saw, as events, and their file
checker    the rules, as a pure function of a history
figures    stalls and times to serve again, as pure functions of a history
workload   the program that produces and consumes, a process of its own; `load` starts it
processes  ZooKeeper, bookies and brokers, each supervised
lines      a TCP relay in front of each daemon, which partitions and slows down
schedule   which fault comes when, from a seed
faults     how each fault is carried out, healed, and proved to have fired
run        all of it together; `table` prints what came out
"""
