package metrics

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-lb/sluice/maps"
)

// handshakeFamilies returns the series of TCP handshakes, of those listed that had any.
func handshakeFamilies(listed []labelled, labels [][]*dto.LabelPair) []*dto.MetricFamily {
	var measured []counts
	var of [][]*dto.LabelPair
	for i := range listed {
		if c := listed[i].counts; c.hasHandshakes() {
			measured, of = append(measured, c), append(of, labels[i])
		}
	}

	return []*dto.MetricFamily{
		serviceHandshakes.histograms(of, func(i int) *dto.Histogram { return measured[i].durations() }),
		serviceSYNs.histograms(of, func(i int) *dto.Histogram { return measured[i].retransmittedSYNs() }),
		serviceUnanswered.family(of, func(i int) float64 { return float64(measured[i].get(maps.StatUnanswered)) }),
		serviceRetransmits.family(of, func(i int) float64 { return float64(measured[i].get(maps.StatRetransmits)) }),
	}
}

// hasHandshakes reports whether a handshake or a retransmission was counted.
func (t counts) hasHandshakes() bool {
	for _, c := range t {
		if c.what >= maps.StatHandshakeTime && c.what != maps.StatHiddenRefusals && c.n != 0 {
			return true
		}
	}

	return false
}

// answered returns how many handshakes were answered.
func (t counts) answered() uint64 {
	var sum uint64
	for _, c := range t {
		if c.what >= maps.StatHandshake {
			sum += c.n
		}
	}

	return sum
}

// durations returns the handshakes that were answered, by their duration.
func (t counts) durations() *dto.Histogram {
	var zero uint64
	buckets := make(map[int]int64)
	for _, c := range t {
		switch {
		case c.what == maps.StatHandshake:
			zero = c.n
		case c.what > maps.StatHandshake && c.n != 0:
			buckets[maps.HistogramLeast<<maps.HistogramSchema+int(c.what-maps.StatHandshake)] = int64(c.n)
		}
	}
	seconds := float64(t.get(maps.StatHandshakeTime)) / float64(time.Second)

	return native(t.answered(), seconds, buckets, zero, maps.HistogramSchema, math.Exp2(float64(maps.HistogramLeast)))
}

// retransmittedSYNs returns all handshakes that have ended, by how many SYNs were sent again.
func (t counts) retransmittedSYNs() *dto.Histogram {
	const schema, threshold = 0, 0.5
	ended, again := t.answered()+t.get(maps.StatUnanswered), uint64(0)
	buckets := make(map[int]int64)
	for _, c := range t {
		if c.what >= maps.StatSYNs && c.what < maps.StatHandshake && c.n != 0 {
			buckets[int(c.what-maps.StatSYNs)] = int64(c.n)
			again += c.n
		}
	}
	ended = max(ended, again) // programs count while all this is read

	return native(ended, float64(t.get(maps.StatSYNRetransmits)), buckets, ended-again, schema, threshold)
}

// native returns a native histogram; zero counts what is at most threshold.
func native(count uint64, sum float64, buckets map[int]int64, zero uint64, schema int, threshold float64) *dto.Histogram {
	var m dto.Metric
	h := prometheus.MustNewConstNativeHistogram(unnamed, count, sum, buckets, nil, zero, int32(schema), threshold, time.Time{})
	_ = h.Write(&m) // it never fails
	m.Histogram.CreatedTimestamp = nil

	return m.Histogram
}

// unnamed is the description of a histogram that is moved into a family.
var unnamed = prometheus.NewDesc("unnamed", "", nil, nil)

// histograms returns a metric family with a histogram for each set of labels.
func (m *metric) histograms(labels [][]*dto.LabelPair, value func(i int) *dto.Histogram) *dto.MetricFamily {
	all := make([]*dto.Metric, len(labels))
	for i := range labels {
		all[i] = &dto.Metric{Label: labels[i], Histogram: value(i)}
	}

	return &dto.MetricFamily{Name: &m.name, Help: &m.help, Type: &m.kind, Metric: all}
}
