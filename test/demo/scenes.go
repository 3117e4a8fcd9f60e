package main

import "context"

// scene is one thing to show. Its play prints what it has observed, and returns
// an error if that is not what it should have been.
type scene struct {
	title string
	story string // what happens, and why that is interesting
	play  func(context.Context, *stage) error
}

func scenes() []scene {
	return []scene{
		{
			"A pod dials a Service",
			"pod-1-3 connects to Service web, again and again. Every connect() is handed the address of a backend; from then on it is a plain connection between two pods, and costs what one costs.",
			playClusterIP,
		},
		{
			"IPv6",
			"web has an IPv6 address too. And some programs have IPv6 sockets only, and write an IPv4 address as ::ffff:10.96.0.80. Both take the same way.",
			playIPv6,
		},
		{
			"UDP",
			"A DNS client ignores answers from any address that it did not ask. So they must come from the Service's address, although a pod sends them, whether the socket is connected or not.",
			playUDP,
		},
		{
			"Node ports",
			"Port 30080 of the node leads to web, from everywhere. On the node itself it does so on localhost as well, in both families.",
			playNodePort,
		},
		{
			"A backend leaves",
			"pod-1-2 is taken out of the manifests, while 500 connections are made per second and a UDP socket is connected to it.",
			playLeaving,
		},
		{
			"No endpoints",
			"A client of a Service without endpoints is refused at once instead of after a timeout, and the refusal is counted by its reason.",
			playRefused,
		},
		{
			"The agent is killed",
			"With 500 connections open, and more being made. The agent writes maps, and the kernel reads them: no client needs the agent to connect.",
			playKilled,
		},
		{
			"Looking inside",
			"What is programmed, who answers, and whether the maps are what they should be. For programs there is -o json.",
			playVerbs,
		},
	}
}
