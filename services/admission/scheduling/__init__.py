"""Scheduling: who runs now, who keeps memory while a tool runs, and who waits. Pure: no clock, no I/O.

`interface` is what a policy implements, and all that it may know; the service and the laboratory drive any policy
through it. The other modules are what several policies share. The policies are in `services.admission.policies`.
"""
