package lb

import (
	"net/netip"
	"reflect"
	"testing"
	"time"
)

// Every field of the types that a State compares makes a difference. A change of a field
// that equal forgets would be lost.
func TestEqualForgetsNoField(t *testing.T) {
	differ(t, EndpointSlice{}, func(a, b EndpointSlice) bool { return a.equal(&b) })
	differ(t, Node{}, func(a, b Node) bool { return a.equal(&b) })
	differ(t, Service{}, func(a, b Service) bool { return a.equal(&b) })
}

// differ checks that a value with any one field set is not equal to zero.
func differ[T any](t *testing.T, zero T, equal func(a, b T) bool) {
	t.Helper()
	if !equal(zero, zero) {
		t.Errorf("%T is not equal to itself", zero)
	}
	for i := range reflect.TypeFor[T]().NumField() {
		changed := zero
		field := reflect.ValueOf(&changed).Elem().Field(i)
		field.Set(someValue(t, field.Type()))
		if equal(zero, changed) || equal(changed, zero) {
			t.Errorf("%T: %s makes no difference", zero, reflect.TypeFor[T]().Field(i).Name)
		}
	}
}

func someValue(t *testing.T, of reflect.Type) reflect.Value {
	t.Helper()
	some := reflect.New(of).Elem()
	switch of {
	case reflect.TypeFor[netip.Addr]():
		some.Set(reflect.ValueOf(ip("10.0.0.1")))
		return some
	case reflect.TypeFor[time.Time]():
		some.Set(reflect.ValueOf(time.Unix(1, 0)))
		return some
	}
	switch of.Kind() {
	case reflect.String:
		some.SetString("x")
	case reflect.Bool:
		some.SetBool(true)
	case reflect.Uint8, reflect.Uint16:
		some.SetUint(1)
	case reflect.Int, reflect.Int64:
		some.SetInt(1)
	case reflect.Slice:
		some.Set(reflect.MakeSlice(of, 1, 1))
	case reflect.Struct:
		some.Field(0).Set(someValue(t, of.Field(0).Type))
	default:
		t.Fatalf("there is no value of %v for the test", of)
	}
	return some
}

func TestSameMomentIsEqual(t *testing.T) {
	now := time.Unix(1e9, 0)
	a, b := web(), web()
	a.Created, b.Created = now, now.In(time.FixedZone("elsewhere", 3600))
	if !a.equal(b) {
		t.Error("a Service differs by the time zone of its creation")
	}
}

func TestEqualLooksIntoEndpoints(t *testing.T) {
	a, b := slice("a", endpoint("10.0.0.1")), slice("a", endpoint("10.0.0.1", draining))
	if a.equal(b) {
		t.Error("an endpoint's condition makes no difference")
	}
}
