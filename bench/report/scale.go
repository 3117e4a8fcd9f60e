package report

import (
	"math"
	"strconv"

	"gonum.org/v1/plot"
)

// constantTicks are ticks at these values, with their names.
type constantTicks []float64

// Ticks returns the ticks that lie within the axis.
func (c constantTicks) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for _, value := range c {
		if low <= value && value <= high {
			ticks = append(ticks, plot.Tick{Value: value, Label: groupThousands(value)})
		}
	}

	return ticks
}

// decadeTicks are ticks at 1, 2 and 5 times powers of ten, for a logarithmic
// axis, which begins above zero. On a long axis, only powers of ten have a name.
type decadeTicks struct{}

// Ticks returns the ticks that lie within the axis.
func (decadeTicks) Ticks(low, high float64) []plot.Tick {
	if low <= 0 {
		return nil
	}
	long := high/low > 2000
	var ticks []plot.Tick
	for decade := math.Pow10(int(math.Floor(math.Log10(low)))); decade <= high; decade *= 10 {
		for digit := 1.0; digit < 10; digit++ {
			value := digit * decade
			if value < low || value > high {
				continue
			}
			tick := plot.Tick{Value: value}
			if digit == 1 || !long && (digit == 2 || digit == 5) {
				tick.Label = formatTick(value)
			}
			ticks = append(ticks, tick)
		}
	}

	return ticks
}

// linearTicks are at most seven ticks at round values, for an axis from zero.
type linearTicks struct{}

// Ticks returns the ticks of the axis.
func (linearTicks) Ticks(_, high float64) []plot.Tick {
	step := math.Pow10(int(math.Floor(math.Log10(high))) - 1)
	for _, times := range []float64{2, 2.5, 2, 2, 2.5, 2} { // 1, 2, 5, 10, ...
		if high/step <= 6 {
			break
		}
		step *= times
	}
	var ticks []plot.Tick
	for i := 0.0; i*step <= high; i++ {
		ticks = append(ticks, plot.Tick{Value: i * step, Label: formatTick(i * step)})
	}

	return ticks
}

// formatTick writes a round value without digits that say nothing.
func formatTick(value float64) string {
	if value >= 1000 {
		return groupThousands(value)
	}

	return strconv.FormatFloat(value, 'g', 4, 64)
}
