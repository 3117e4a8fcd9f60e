package metrics

import "slices"

// group is one table of docs/metrics.md.
type group struct {
	title   string
	about   string
	metrics []*metric
}

// groups returns all metrics of Sluice's own.
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
				"a scrape shows its last answer. Impaired Services are determined every 5 seconds.",
			metrics: []*metric{buildInfo, synced, knownServices, problems, impaired},
		},
		{
			title: "Maps",
			about: "For maps that the agent writes, it counts entries and writes itself. Maps that only programs write are read once in a " +
				"minute at most; the counts of Services are counted whenever they are read.",
			metrics: []*metric{mapEntries, mapCapacity, mapWrites, mapMended},
		},
		{
			title: "Hooks and devices",
			about: "Hooks of the cgroup are looked up in the kernel, with a few system calls each. For devices, a scrape shows what the agent " +
				"found at its last check: every 30 seconds, and after each change.",
			metrics: []*metric{decisions, effective, hookAttached, devices, deviceProblems},
		},
		{
			title:   "Flows",
			about:   "From the last sweep over the flow tables of devices: every 10 seconds, less often if they are large.",
			metrics: []*metric{evictions, alarm, alarms, flowsEnded, flowsRepaired, loadsRepaired, masqueradeRetries, stackPorts, socketsEnded},
		},
	}
}

// nodeMetrics returns the metrics of a [NodeCollector].
func nodeMetrics() []*metric {
	var all []*metric
	for _, g := range nodeGroups() {
		all = append(all, g.metrics...)
	}

	// A Sync counts these two.
	return slices.DeleteFunc(all, func(m *metric) bool { return m == mapMended || m == socketsEnded })
}

const servicesAbout = `Programs count the outcomes of new flows for each service port and family. A scrape reads these counts, and joins them with the names of Services; counts that were read within the last 5 seconds are not read again.

At most ` + "`--service-metrics`" + ` Services have series of their own: first come, first served, and as long as the Service exists. A Service that found none left is counted among the others, also after it is gone; all others together have the namespace ` + "`\"\"`" + ` and the service ` + "`(others)`" + `. 0 switches these series off, and the counting.

A Service's counters continue when its ports come and go. They begin at zero when the agent is started, though programs count meanwhile: the maps do not have everything that an earlier agent has shown, and Prometheus takes a counter that has fallen a little for one that has been reset and has grown to its value since. Counters also begin at zero for a Service that is deleted and created again after a scrape.`
