package metrics

import "slices"

// group is a table of docs/metrics.md.
type group struct {
	title   string
	about   string
	metrics []*metric
}

// groups are all of ours.
func groups() []group {
	return append([]group{{title: "Services", about: servicesAbout, metrics: serviceMetrics()}}, nodeGroups()...)
}

func serviceMetrics() []*metric {
	return []*metric{
		serviceConnections, serviceFailures, serviceSent, serviceReceived, serviceActive, serviceSeries, serviceSeriesLimit,
	}
}

func nodeGroups() []group {
	return []group{
		{
			title: "The agent",
			about: "A scrape asks the goroutine that programs Services for a few numbers. While it is busy for more than a second, " +
				"its last answer counts. Which Services are impaired is found out every 5 seconds.",
			metrics: []*metric{buildInfo, synced, knownServices, problems, impaired},
		},
		{
			title: "Maps",
			about: "What the agent writes it counts itself: nothing is read for it. Maps that only programs write are read once in a " +
				"minute at most; the counts of Services are counted whenever they are read.",
			metrics: []*metric{mapEntries, mapCapacity, mapWrites, mapMended},
		},
		{
			title: "Hooks and devices",
			about: "Hooks of the cgroup are looked up in the kernel, with a few system calls each. Of devices it tells what the agent " +
				"found when it last looked: every 30 seconds, and after each change.",
			metrics: []*metric{decisions, effective, hookAttached, devices, deviceProblems},
		},
		{
			title:   "Flows",
			about:   "From the last look at the flow tables of devices: every 10 seconds, less often if they are large.",
			metrics: []*metric{evictions, alarm, alarms, flowsEnded, flowsRepaired, loadsRepaired, masqueradeRetries, stackPorts, socketsEnded},
		},
	}
}

// nodeMetrics are those of a [NodeCollector].
func nodeMetrics() []*metric {
	var all []*metric
	for _, g := range nodeGroups() {
		all = append(all, g.metrics...)
	}

	// These two a Sync counts.
	return slices.DeleteFunc(all, func(m *metric) bool { return m == mapMended || m == socketsEnded })
}

const servicesAbout = `Programs count for each service port and family what becomes of new flows. A scrape reads these counts, and joins them with the names of Services; what was read within the last 5 seconds is not read again.

At most ` + "`--service-metrics`" + ` Services have series of their own: first come, first served, and as long as the Service exists. A Service that found none left stays among the others, and so do its counts when it is gone; all others together have the namespace ` + "`\"\"`" + ` and the service ` + "`(others)`" + `. 0 switches these series off, and the counting.

A Service's counters go on when its ports come and go. They begin at zero when the agent is started, though programs count meanwhile: not all that an earlier agent has shown is in the maps, and to Prometheus a counter that has fallen a little has come from zero to where it is. So do those of a Service that is deleted and created again after a scrape.`
