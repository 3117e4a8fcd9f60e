package maps

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -type addr -type frontend_key -type frontend -type backend -type service_port -type node_addr -type source_range_key -type service_cidr_key -type affinity_key -type affinity -type sock_state -type udp_pin_key -type udp_pin -type translated_sock -type scope -type kind -type frontend_flag -type backend_flag -type node_addr_flag -type reason -type client_kind -type udp_pin_way -target bpfel treaty maps.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Wextra -Werror
