package lab

import "fmt"

// RunningLoad is a [Load] in a [Caller]'s process.
type RunningLoad struct {
	caller *Caller
	number int
}

// StartLoad starts a load and returns at once.
func (c *Caller) StartLoad(load Load) (*RunningLoad, error) {
	answer, err := c.call(call{Act: actStartLoad, Load: &load})
	if err != nil {
		return nil, err
	}

	return &RunningLoad{caller: c, number: answer.Socket}, nil
}

// Wait waits until the load's duration is over and returns its result.
func (l *RunningLoad) Wait() (LoadReport, error) { return l.end(actAwaitLoad) }

// Stop stops the load, lets the exchanges under way finish, and returns what
// the result.
func (l *RunningLoad) Stop() (LoadReport, error) { return l.end(actStopLoad) }

func (l *RunningLoad) end(act act) (LoadReport, error) {
	answer, err := l.caller.call(call{Act: act, Socket: l.number})
	if err != nil {
		return LoadReport{}, err
	}

	return *answer.Report, nil
}

func (c *callee) startLoad(load Load) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	number := c.number()
	c.loads[number] = startLoad(load)

	return number
}

// endLoad waits for a load, or stops it, and forgets it.
func (c *callee) endLoad(number int, stop bool) (*LoadReport, error) {
	c.mu.Lock()
	run, ok := c.loads[number]
	delete(c.loads, number)
	c.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("no load %d", number)
	}
	if stop {
		close(run.stop)
	}
	<-run.done

	return &run.report, nil
}
