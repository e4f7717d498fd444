"""Types of the binary module of the simulator's ops (csrc/sim/module.cpp): it binds nothing."""
