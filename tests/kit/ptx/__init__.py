"""Compiled kernels without a GPU: all threads of a program run through its PTX in step, on host memory, and what races or strays is found.

The interpreters of `atoll.probe` check a kernel's source; this checks what the compiler made of it: the barriers that it placed or left out, the addresses that
it computed, the shared memory that it used twice. It trusts what PTX's documentation says of each instruction, and models neither time nor the machine code
that ptxas makes of PTX. An instruction that it does not know is a Fault that names it.

Not seen: races within a warp, whose threads go in step here; races between programs, which run one after another; accesses to global memory that stay inside a
buffer and are not the kernel's to make, unless they change its answer.
"""
