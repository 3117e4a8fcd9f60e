package bpf

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -type udp_mode -type agent_mark -target bpfel sock sock.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel iter iter.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel syn syn.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel trace trace.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -target bpfel device tc.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -type question -type answer -type pool -type addr -type frontend_key -type pod_uid -type finding -target bpfel probe probe.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror -Wno-unused-function
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -no-global-types -type step_op -type step -target bpfel -output-suffix _test heal testdata/heal.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
