// Package load measures what connections and datagrams take: a load generator, a
// server that answers it, a probe that sees when a Service leads elsewhere, and
// iperf3 for what it does well. Each is a process in a namespace and a cgroup of the
// lab, so that socket hooks see it as they see a pod. [Main] must be called first.
//
// # What is on the clock
//
//	connect          socket  [connect]  send receive  close
//	exchange                            [send receive]
//	udp-connected                       [send receive]
//	udp-unconnected                     [sendto recvfrom]
//	udp-new         [socket   connect   send receive  close]
//
// Each client is a thread of the generator that blocks in these system calls. The
// clock is CLOCK_MONOTONIC, read right before and after. Every latency is kept, so
// that quantiles are exact. The response must repeat the request's number, and come
// from the address that was asked; otherwise, or after a second, the exchange has
// failed. What failed is counted beside the latencies, and is not among them.
//
// # Closed loop, or due times
//
// Without a rate, a client begins when it has done with the exchange before: a
// closed loop. It shows the throughput at saturation, and the latency of each exchange
// that was made. It does not show how long others would have waited: while the
// server stands still for 300 ms, such a client makes one slow exchange instead of
// the 300 that would have come, and the 99th percentile does not move. (This is
// what "coordinated omission" means: the load waits for what it measures.)
//
// With a rate, exchanges are due at even distances, and the clock runs from the
// moment at which one was due, whether a client was ready or not. What
// [Result.Lateness] contains is part of those latencies: the time that clients were
// busy with exchanges before, and what the kernel takes to wake a sleeping thread.
// An exchange that is due is made, or counted as a failure: none is left out.
//
// # The window
//
// What begins (with a rate: is due) in the warm-up is not counted. All clients have
// their connections and caches then. What begins in the window counts, also when it
// ends after it.
//
// # What it costs to measure
//
// Go's package net would take part in the measurement: a poller, a scheduler, and
// several system calls for one. Here, threads make raw system calls, to addresses
// prepared before; the runtime collects nothing, and threads have their places in
// its scheduler for good. What is left: two readings of the clock for each
// exchange, some 30 ns each; a time-out for each socket that is made, two system calls; and,
// a hundred times a second, what the scheduler takes to see that all goes well.
//
// Sampled by perf, 4.1 % of the generator's CPU time are spent in user mode when it
// connects (16 clients, two processors), 0.3 % by Go's runtime; the rest is the
// kernel's. Of the server's, 6.1 % and 1.5 %. Beside a minimal program in C with the same
// system calls, on a veth pair and to the same server, it takes 2 µs more in user
// mode for each connection, of some 80 µs; the difference in rate is within the
// noise.
//
// # The server
//
// A connection is accepted when its request has come (TCP_DEFER_ACCEPT). Client
// and server share their processors here, which no client does with a server
// elsewhere: a thread that the handshake wakes takes the client's place while that
// is in its connect call. With 16 clients on two processors, the connect call then
// took 48 µs in the median, and the ninth decile was 1.1 ms; with a request to
// accept by, it takes 19 and 34 µs. What is on the wire is the same.
//
// A connection is closed by the client, with a FIN, unless [Work.Closing] differs.
// So the client keeps it in TIME_WAIT; see [Run] for how it does not run out
// of ports. The probe resets its connections.
package load
