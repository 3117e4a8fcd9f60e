// Package model holds Sluice against CONTRACT.md. It has a model of what
// kube-proxy does, naive enough to be read beside the contract's part 0, and
// gives the same random Services, EndpointSlices, Nodes and ServiceCIDRs to that
// model and to Sluice. After every change both are asked for the outcome of a
// connection, for every address, port, protocol and client.
//
//	objects_test.go      the model: Services and their slices (CONTRACT 1.1-1.9)
//	decide_test.go       the model: the outcome of a packet (CONTRACT part 0)
//	differences_test.go  where Sluice differs on purpose: all of it, each with its reason
//	programs_test.go     what Sluice's maps answer, read as the programs in bpf/ read them
//	subject_test.go      Sluice itself, from the objects to the maps
//	generate_*_test.go   the random objects and changes
//	session_test.go      a sequence of changes, and the comparison after each
//	shrink_test.go       the shortest sequence that still fails, as YAML
//
// The model shares no code with pkg/lb or pkg/kube.
package model
