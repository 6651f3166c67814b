// Writes records to a topic, reads them as a group, and prints what happened as one line of JSON.
//
//	franz_go BOOTSTRAP TOPIC GROUP COUNT
//
// The producer has the defaults of franz-go: idempotent, several requests in flight. The group reads
// twice: what its first member committed, the second one must not get again.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// What came of it; the test compares it.
type outcome struct {
	Acked     int  `json:"acked"`      // records that the server says it stored
	Read      int  `json:"read"`       // by the group's first member
	Wrong     int  `json:"wrong"`      // read at another offset than acked, or with another content
	Headers   int  `json:"headers"`    // of the first record
	Again     int  `json:"again"`      // read by a second member after the first one committed
	LastValue bool `json:"last_value"` // the second member gets what was written after the commit
}

const patience = 60 * time.Second

func value(number int) string { return fmt.Sprintf("value-%d", number) }

func main() {
	if len(os.Args) != 5 {
		log.Fatal("usage: franz_go BOOTSTRAP TOPIC GROUP COUNT")
	}
	count, err := strconv.Atoi(os.Args[4])
	if err != nil {
		log.Fatal(err)
	}
	found, err := run(os.Args[1], os.Args[2], os.Args[3], count)
	if err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(found); err != nil {
		log.Fatal(err)
	}
}

func run(bootstrap, topic, group string, count int) (outcome, error) {
	var found outcome
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	stored, err := produce(ctx, bootstrap, topic, count)
	if err != nil {
		return found, err
	}
	found.Acked = len(stored)

	records, err := read(ctx, bootstrap, topic, group, count)
	if err != nil {
		return found, err
	}
	found.Read = len(records)
	for _, record := range records {
		if stored[position{record.Partition, record.Offset}] != string(record.Value) {
			found.Wrong++
		}
		if string(record.Value) == value(0) {
			found.Headers = len(record.Headers)
		}
	}

	if _, err := produceOne(ctx, bootstrap, topic, "last"); err != nil {
		return found, err
	}
	records, err = read(ctx, bootstrap, topic, group, 1)
	if err != nil {
		return found, err
	}
	for _, record := range records {
		if string(record.Value) == "last" {
			found.LastValue = true
		} else {
			found.Again++
		}
	}
	return found, nil
}

type position struct {
	partition int32
	offset    int64
}

func produce(ctx context.Context, bootstrap, topic string, count int) (map[position]string, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(bootstrap), kgo.DefaultProduceTopic(topic))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	records := make([]*kgo.Record, 0, count)
	for number := range count {
		record := kgo.KeyStringRecord(fmt.Sprintf("key-%d", number%17), value(number))
		record.Headers = []kgo.RecordHeader{{Key: "number", Value: []byte(strconv.Itoa(number))}}
		records = append(records, record)
	}
	stored := make(map[position]string, count)
	for _, result := range client.ProduceSync(ctx, records...) {
		if result.Err != nil {
			return nil, result.Err
		}
		record := result.Record
		stored[position{record.Partition, record.Offset}] = string(record.Value)
	}
	return stored, nil
}

func produceOne(ctx context.Context, bootstrap, topic, text string) (*kgo.Record, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(bootstrap), kgo.DefaultProduceTopic(topic))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return client.ProduceSync(ctx, kgo.StringRecord(text)).First()
}

// A member of the group that reads so many records, commits them and leaves.
func read(ctx context.Context, bootstrap, topic, group string, count int) ([]*kgo.Record, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(bootstrap),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
	)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var records []*kgo.Record
	for len(records) < count {
		fetches := client.PollFetches(waiting)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("after %d of %d records: %w", len(records), count, err)
		}
		records = append(records, fetches.Records()...)
	}
	if err := client.CommitUncommittedOffsets(ctx); err != nil {
		return nil, err
	}
	return records, client.LeaveGroupContext(ctx)
}
