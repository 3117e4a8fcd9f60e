package lab

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var whoOverTCP = Exchange{Network: "tcp4", Address: "127.0.0.1:8080"}

// mustLoad runs a load until its duration is over.
func mustLoad(t testing.TB, caller *Caller, load Load) LoadReport {
	t.Helper()
	run, err := caller.StartLoad(load)
	Must(t, err)
	report, err := run.Wait()
	Must(t, err)

	return report
}

func TestLoadIsAsFastAndAsLongAsItShouldBe(t *testing.T) {
	p := mustPair(t)
	report := mustLoad(t, p.caller, Load{Exchange: whoOverTCP, Rate: 500, Duration: 200 * time.Millisecond})
	if report.Started != 100 || report.Succeeded != 100 || report.Answers["echo"] != 100 {
		t.Errorf("report is %+v, want 100 answers", report)
	}
}

func TestLoadStops(t *testing.T) {
	p := mustPair(t)
	run, err := p.caller.StartLoad(Load{Exchange: whoOverTCP, Rate: 500})
	Must(t, err)
	time.Sleep(20 * time.Millisecond)
	report, err := run.Stop()
	Must(t, err)
	if report.Started == 0 || report.Succeeded != report.Started {
		t.Errorf("report is %+v, want some answers and no failures", report)
	}
	if _, err := run.Stop(); err == nil {
		t.Error("no error from stopping twice")
	}
}

func TestLoadSharesKeptConnections(t *testing.T) {
	p := mustPair(t)
	report := mustLoad(t, p.caller, Load{Exchange: whoOverTCP, Rate: 500, Duration: 100 * time.Millisecond, Keep: 3})
	if made := p.server.Connections(); report.Succeeded != 50 || made != 3 {
		t.Errorf("%d connections made, report is %+v, want 3 and 50 answers", made, report)
	}
}

func TestLoadReportsEachFailure(t *testing.T) {
	p := mustPair(t)
	closed := Exchange{Network: "tcp4", Address: "127.0.0.1:9"}
	report := mustLoad(t, p.caller, Load{Exchange: closed, Rate: 500, Duration: 10 * time.Millisecond})
	if len(report.Failures) != 5 || report.Succeeded != 0 {
		t.Fatalf("report is %+v, want 5 failures", report)
	}
	for _, failure := range report.Failures {
		if failure.Errno != unix.ECONNREFUSED || failure.Call != "connect" || failure.Start.IsZero() {
			t.Errorf("failure is %s, want a refused connect", failure)
		}
	}
}
