package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// shrink returns a short session that still fails, if s does: first without the
// changes, then without the parts of objects that it does not need.
func shrink(s *session) (*session, *failure) {
	small := *s
	small.all = true
	_, failed := small.play()
	if failed == nil {
		return s, nil // only with the clients that chance chose
	}
	fails := func(steps []step) bool {
		try := small
		try.steps = steps
		_, f := try.play()
		if f != nil {
			small.steps, failed = steps, f
		}
		return f != nil
	}
	fails(slices.Clone(small.steps[:failed.step+1]))
	for again := true; again; {
		again = dropChanges(&small, fails) || dropParts(&small, fails)
	}
	return &small, failed
}

// dropChanges tries to do without each step and each change.
func dropChanges(s *session, fails func([]step) bool) bool {
	dropped := false
	for i := len(s.steps) - 1; i >= 0; i-- {
		if len(s.steps) > 1 && fails(slices.Delete(slices.Clone(s.steps), i, i+1)) {
			dropped = true
			continue
		}
		for j := len(s.steps[i]) - 1; j >= 0; j-- {
			steps := slices.Clone(s.steps)
			steps[i] = slices.Delete(slices.Clone(steps[i]), j, j+1)
			dropped = fails(steps) || dropped
		}
	}
	return dropped
}

// dropParts tries to do without each field and each element of the objects.
func dropParts(s *session, fails func([]step) bool) bool {
	dropped := false
	for i := range s.steps {
		for j := range s.steps[i] {
			for _, path := range partsOf(s.steps[i][j]) {
				less, ok := without(s.steps[i][j], path)
				if !ok {
					continue // an earlier one has gone, and this one with it
				}
				steps := slices.Clone(s.steps)
				steps[i] = slices.Clone(steps[i])
				steps[i][j] = less
				dropped = fails(steps) || dropped
			}
		}
	}
	return dropped
}

// A part of a change is named by the keys and indices that lead to it in its JSON.

// partsOf returns the parts of a change, elements from the last to the first, and
// nothing that names an object.
func partsOf(ch change) [][]any {
	var parts [][]any
	var walk func(v any, path []any)
	walk = func(v any, path []any) {
		switch v := v.(type) {
		case map[string]any:
			for _, key := range slices.Sorted(maps.Keys(v)) {
				if key != "name" && key != "namespace" && key != "creationTimestamp" && len(path) > 0 {
					parts = append(parts, append(slices.Clone(path), key))
				}
				walk(v[key], append(slices.Clone(path), key))
			}
		case []any:
			for i := len(v) - 1; i >= 0; i-- {
				parts = append(parts, append(slices.Clone(path), i))
				walk(v[i], append(slices.Clone(path), i))
			}
		}
	}
	walk(asJSON(ch), nil)
	return parts
}

// without returns a change without one of its parts, false if it has no such part.
func without(ch change, path []any) (change, bool) {
	all := asJSON(ch)
	left, ok := cut(all, path)
	text, err := json.Marshal(left)
	if !ok || err != nil {
		return change{}, false
	}
	var less change
	err = json.Unmarshal(text, &less)
	return less, err == nil && !reflect.DeepEqual(asJSON(less), asJSON(ch)) // some fields come back, empty
}

func cut(v any, path []any) (any, bool) {
	last := len(path) == 1
	switch v := v.(type) {
	case map[string]any:
		key, ok := path[0].(string)
		if _, there := v[key]; !ok || !there {
			return v, false
		}
		if last {
			delete(v, key)
			return v, true
		}
		v[key], ok = cut(v[key], path[1:])
		return v, ok
	case []any:
		i, ok := path[0].(int)
		if !ok || i >= len(v) {
			return v, false
		}
		if last {
			return slices.Delete(v, i, i+1), true
		}
		v[i], ok = cut(v[i], path[1:])
		return v, ok
	}
	return v, false
}

// asJSON returns a change as maps, lists and values.
func asJSON(ch change) any {
	text, err := json.Marshal(ch)
	if err != nil {
		panic(err)
	}
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		panic(err)
	}
	return v
}

// withoutNoise removes from JSON what has no meaning: empty objects, and parts of a Node
// that have no "omitempty".
func withoutNoise(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			v[key] = withoutNoise(value)
			object, is := v[key].(map[string]any)
			if key == "nodeInfo" || key == "daemonEndpoints" || is && len(object) == 0 {
				delete(v, key)
			}
		}
	case []any:
		for i := range v {
			v[i] = withoutNoise(v[i])
		}
	}
	return v
}

// String is a session as people read it: options, then a list of changes for each
// step.
func (s *session) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "options: %+v\n", s.options)
	for i, st := range s.steps {
		var said []any
		for _, ch := range st {
			said = append(said, withoutNoise(asJSON(ch)))
		}
		y, err := yaml.Marshal(said)
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(&text, "# step %d\n%s", i, y)
	}
	return text.String()
}
